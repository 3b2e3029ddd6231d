"""What can be seen of a job, whoever looks: the facts of a running job, and those that outlive its driver.

REST, the page, the command line, metrics and health read `facts.JobFacts` and nothing else. `views` says how a job is
found and steered. Only `job`, `rest` and `admin` import this package.
"""
