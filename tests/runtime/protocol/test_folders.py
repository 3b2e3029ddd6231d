"""What a task manager deletes of the folder that it shares with the driver."""

from __future__ import annotations

import uuid

from strandline.runtime.protocol.folders import DRIVER_SOCKET, clear_socket_folder, socket_folder
from strandline.runtime.protocol.user_folder import make_private


def test_a_task_manager_that_ends_leaves_the_socket_of_a_driver_that_may_only_be_stopped() -> None:
    run_id = uuid.uuid4().hex
    folder = make_private(socket_folder(run_id))
    try:
        for name in (DRIVER_SOCKET, "tm-1.sock"):
            (folder / name).touch()
        (folder / "executor").mkdir()
        (folder / "executor" / "address.json").touch()
        clear_socket_folder(run_id)
        assert [path.name for path in folder.iterdir()] == [DRIVER_SOCKET]
    finally:
        (folder / DRIVER_SOCKET).unlink(missing_ok=True)
        clear_socket_folder(run_id)
    assert not folder.exists()
    clear_socket_folder(run_id)
