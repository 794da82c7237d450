"""`k3hal` commands of one environment, each in a fork of a process that has loaded the libraries once.

Loading takes most of the time of a short command. The fork gets the command's arguments, folder, environment, input and
outputs, and then runs the same `main` as the installed command does.

    python warm_k3hal.py SOCKET        serves until an empty message
    python -S warm_k3hal.py SOCKET run ARGUMENTS...        runs a command there
"""

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

_LARGEST = 1 << 20


def serve(path: str) -> None:
    import torch  # noqa: F401 - what is loaded here need not be loaded by each command

    from k3hal.cli import main

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen()
        # It is there when it can be connected to.
        os.rename(f"{path}.new", path)
        while True:
            connection, _ = server.accept()
            with connection:
                message, files, _, _ = socket.recv_fds(connection, _LARGEST, 3)
                if not message:
                    return
                child = os.fork()
                if child == 0:
                    server.close()
                    _run(json.loads(message), files, main)
                for file in files:
                    os.close(file)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                connection.sendall(str(code if code >= 0 else 128 - code).encode())


def _run(job: dict[str, Any], files: list[int], main: Callable[[], int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # The old ones know the files of the server, whether these can be sought in for example.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environ"])
    sys.argv = ["k3hal", *job["args"]]
    code = 3
    try:
        code = main()
    except BaseException:  # noqa: BLE001 - shown, and the fork ends here in any case
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(path: str, args: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        job = {"args": args, "cwd": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(job).encode()], [0, 1, 2])
        return int(connection.recv(16) or b"3")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[3:]) if len(sys.argv) > 2 else serve(sys.argv[1]))
