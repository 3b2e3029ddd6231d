"""The folder of a `ParquetSink` as the driver sees it: files are published by giving them their final names."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from strandline.checkpoint.job_log import JobLog
from strandline.checkpoint.metadata import SinkFile
from strandline.sinks.base import SinkCommit, SinkStart, SinkTakeover, SinkTarget
from strandline.sinks.local_folders import check_folder
from strandline.sinks.parquet.empty_output import check_readable_together, make_readable
from strandline.sinks.parquet.files import check_sink, recover_sink
from strandline.sinks.parquet.owner import check_still_owner, claim_sink
from strandline.sinks.staging import publish, staged_files
from strandline.storage import Storage


class ParquetTarget(SinkTarget):
    """A folder that belongs to one job. Its rows can be withdrawn, because each file has rows of one batch."""

    def __init__(self, storage: Storage, place: str, job: str, columns: pa.Schema | None = None) -> None:
        """`columns` are those of the files; None leaves them unchecked."""
        self.storage = storage
        self.place = place
        self._job = job
        self._columns = columns

    @property
    def can_go_back(self) -> bool:
        return True

    def check(self, start: SinkStart) -> int:
        check_folder(self.place, self._job, self.storage.url)
        newest = check_sink(
            self.storage,
            self.place,
            self._job,
            start.restored,
            start.log,
            start.retries,
            takes_sinks=start.takes_sinks,
        )
        columns = self._columns
        if columns is not None:
            start.retries.call(
                f"job {self._job}: the columns of {self.storage.url}",
                lambda: check_readable_together(self.storage, self._job, columns),
            )
        return newest

    def claim(self, log: JobLog) -> None:
        claim_sink(self.storage, self._job, log)

    def recover(self, takeover: SinkTakeover) -> None:
        recover_sink(
            self.storage,
            self.place,
            self._job,
            takeover.restored,
            takeover.log.generation,
            takeover.check_not_fenced,
            takeover.retries,
            went_back=takeover.log.went_back,
            named=takeover.named,
        )
        staged_files(self.storage, self._job).discard_halves(takeover.log.generation)
        columns = self._columns
        if columns is not None:
            takeover.retries.call(
                f"job {self._job}: the columns of {self.storage.url}",
                lambda: make_readable(self.storage, self._job, columns),
            )

    def publish(self, commit: SinkCommit) -> None:
        self.check_still_ours(commit.log)
        publish(self.storage, commit.files)

    def adopt(self, files: Iterable[SinkFile]) -> None:
        """Publish rows that were staged in this folder when it had another name."""
        publish(self.storage, [file for file in files if self.storage.exists(file.staged)])

    def check_still_ours(self, log: JobLog) -> None:
        check_still_owner(self.storage, self._job, log)
