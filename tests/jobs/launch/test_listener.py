"""Connections to the processes of a job: strangers delay no worker, and stores listen on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from roll_batching.jobs.processes.role_workers import LocalRoleWorkers, WorkerListener, local_store

CALL = """
import sys
from multiprocessing.connection import Client
port, key, number = sys.argv[1:]
connection = Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key))
connection.send(int(number))
connection.send(connection.recv() * 2)
"""


def silent(port, until):
    with socket.create_connection(("127.0.0.1", port)):
        until.wait()


def speaks_http(port, until):
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until.wait()


def claims_much(port, until):
    """Sends the length of a 2 GB message, and no data."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"\x7f\xff\xff\xff")
        until.wait()


def trickles(port, until):
    with socket.create_connection(("127.0.0.1", port)) as line, contextlib.suppress(OSError):
        line.sendall(b"\0\0\0\x20")
        while not until.wait(0.05):
            line.sendall(b"x")


def hangs_up(port, until):
    socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.bad_input
@pytest.mark.parametrize("stranger", [silent, speaks_http, claims_much, trickles, hangs_up])
def test_strangers_hold_nobody_up(stranger):
    """30 strangers connect first, more than a connection queue holds."""
    until = threading.Event()
    with WorkerListener(handshake_seconds=2) as listener:
        crowd = [threading.Thread(target=stranger, args=(listener.port, until), daemon=True) for _ in range(30)]
        for one in crowd:
            one.start()
        time.sleep(0.2)
        command = [sys.executable, "-c", CALL, str(listener.port), listener.key.hex(), "7"]
        with subprocess.Popen(command) as child:
            caller = listener.accept(60)
            assert caller is not None and caller[0] == 7
            caller[1].send(21)
            assert caller[1].recv() == 42
            caller[1].close()
            assert child.wait(20) == 0
        wait_for(lambda: not [one for one in threading.enumerate() if one.name == "handshake"], 20)
    until.set()
    for one in crowd:
        one.join()
    assert not [one for one in threading.enumerate() if one.name == "listener"], "nobody listens any more"


@pytest.mark.bad_input
def test_a_client_with_another_key_is_refused():
    with WorkerListener() as listener:
        command = [sys.executable, "-c", CALL, str(listener.port), "00" * 32, "7"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "AuthenticationError" in done.stderr
        assert listener.accept(0.1) is None


def wait_for(true, seconds):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def listening():
    """Addresses that this process listens on."""
    return {(one.laddr.ip, one.laddr.port) for one in psutil.Process().net_connections() if one.status == "LISTEN"}


def test_the_store_of_processes_of_one_machine_is_for_this_machine():
    """The store of the launcher's ranks, and that of a role's workers."""
    before = listening()
    store = local_store()
    assert listening() - before == {("127.0.0.1", store.port)}
    workers = LocalRoleWorkers("tests.jobs.launch.commands", 0, os.environ)
    assert {ip for ip, _ in listening() - before} == {"127.0.0.1"} and len(listening() - before) == 2
    workers.kill()
