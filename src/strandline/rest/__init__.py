"""The REST interface of the jobs that one process shows: Flink's paths, the facts of a job, metrics and the page.

Every answer is a pure function of `observe.facts.JobFacts`. `server.serve` starts it. Only `job` and `admin` import
this package. `server` and `access` import neither FastAPI nor uvicorn before a server starts.
"""
