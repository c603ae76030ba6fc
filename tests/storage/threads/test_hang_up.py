"""A command that is interrupted sends nothing any more once it has ended."""

from __future__ import annotations

import socket
import subprocess
import sys

_UPLOADING = """
import socket, sys, penstock.cli
def run(arguments):
    global upload
    upload = socket.create_connection(("127.0.0.1", int(arguments[0])))
    upload.setblocking(False)
    sent = 0
    while True:
        try:
            sent += upload.send(bytes(65536))
        except BlockingIOError:
            print(sent, flush=True)
            return penstock.cli.INTERRUPTED
penstock.cli.run = run
penstock.cli.main()
"""


def test_after_ctrl_c_what_is_not_sent_yet_is_dropped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", _UPLOADING, str(server.getsockname()[1])]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (130, "")
        connection, _ = server.accept()
    received, is_broken = 0, False
    with connection:
        try:
            while piece := connection.recv(1 << 20):
                received += len(piece)
        except ConnectionResetError:
            is_broken = True
    assert is_broken  # a server does not take it for a whole object
    assert received < int(ended.stdout)
