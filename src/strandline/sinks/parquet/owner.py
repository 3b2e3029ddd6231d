"""Who owns the folder of a `ParquetSink`: one job, through one log.

A job's log fences the drivers of one `checkpoint_dir`. Two drivers with the same job name and different checkpoint
directories do not see each other there, and each would withdraw the rows of the other. So the file `OWNER` in the
folder names the job and the id of its log. Only a restore that the user asks for hands the folder to another log.
"""

from __future__ import annotations

import msgspec

from strandline.checkpoint.job_log import JobLog
from strandline.checkpoint.metadata import Generation
from strandline.decoding import json_decoder
from strandline.errors import AlreadyExistsError, DirectoryNotOursError, FencedError, NotFoundError, StorageError
from strandline.sinks.names import STAGING_FOLDER
from strandline.storage import Storage

OWNER = f"{STAGING_FOLDER}/owner.json"
"""Says which job owns the folder of a sink."""


class Owner(msgspec.Struct, frozen=True):
    """The content of `OWNER`."""

    job: str
    log_id: str | None = None
    """The log of the job that owns the folder. None if an older release wrote the file."""
    generation: Generation = 0
    """The generation of that log that became the owner."""

    def same_log(self, log_id: str | None) -> bool:
        return self.log_id is None or self.log_id == log_id


def read_owner(storage: Storage) -> Owner | None:
    """The owner of a folder; None if it has none yet. Raises `DirectoryNotOursError` if the file is damaged."""
    try:
        return json_decoder(Owner).decode(storage.read(OWNER))
    except NotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DirectoryNotOursError(
            f"{storage.url}/{OWNER}, which names the job that owns the folder, is damaged: {error}. Delete that file "
            "if no other job writes into the folder."
        ) from error


def check_owner(storage: Storage, owner: Owner, job: str, log: JobLog, *, takes_sinks: bool = False) -> None:
    """Raise `DirectoryNotOursError` unless the job may go on in the folder of `owner`.

    `takes_sinks` says that the next takeover takes the folder over from another log. An earlier takeover of `log` may
    have been meant to, and have died before it could.
    """
    if owner.job != job:
        raise owned_by(storage, owner.job, job)
    if not owner.same_log(log.log_id) and not takes_sinks and owner.generation >= log.sinks_since:
        raise DirectoryNotOursError(
            f"{storage.url} holds the output of job {job!r} from another checkpoint_dir: a job with that name runs, or "
            "ran, with the same output folder, and this one would withdraw its rows. To go on from that job, stop it "
            "and start this one with restore= and the path of its newest checkpoint, or of a savepoint. To run both, "
            "give the sinks different folders. If the other checkpoint_dir is gone, bring it back; or empty the output "
            f"folder, with {OWNER} in it."
        )


def claim_sink(storage: Storage, job: str, log: JobLog) -> None:
    """Make the job, with the log that has won a takeover, the owner of the folder.

    Raises `DirectoryNotOursError` if another job was faster, or another log of the job.
    """
    ours = Owner(job, log.log_id, log.generation)
    owner = read_owner(storage)
    if owner is None:
        try:
            storage.create(OWNER, msgspec.json.encode(ours))
            return
        except AlreadyExistsError as error:
            owner = read_owner(storage)
            if owner is None:
                raise StorageError(f"{storage.url}/{OWNER} exists, but cannot be read yet") from error
    check_owner(storage, owner, job, log)
    if owner.log_id != log.log_id:
        storage.write(OWNER, msgspec.json.encode(ours))


def check_still_owner(storage: Storage, job: str, log: JobLog) -> None:
    """Raise `FencedError` if the folder was handed to another log of the job, or to another job.

    A driver calls this before it changes what readers see.
    """
    owner = read_owner(storage)
    if owner is not None and (owner.job != job or not owner.same_log(log.log_id)):
        raise FencedError(
            f"Job {job!r}: {storage.url} was taken over by job {owner.job!r} with another checkpoint_dir (see {OWNER} "
            f"there, generation {owner.generation}), so this run, generation {log.generation}, stops and changes "
            "nothing there any more. To run both, give them different output folders."
        )


def owned_by(storage: Storage, owner: str, job: str) -> DirectoryNotOursError:
    """The error for a job that wants to write into the folder of another job."""
    return DirectoryNotOursError(
        f"{storage.url} holds the output of job {owner!r}, so job {job!r} cannot write there: neither could tell its "
        f"rows from the other's. Give the sink a folder of its own; or, if job {owner!r} is never started again and "
        f"its rows may stay, delete {OWNER} there and move its files away."
    )
