"""Who may speak to the processes of a job: strangers hold nobody up, and stores are for this machine alone."""

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

from roll_batching.jobs.launch.on_ray.callers import Callers
from roll_batching.jobs.processes.world import ChildWorld, local_store

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
    """The length of a message of 2 GB, and none of it."""
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
    """30 of them come first, more than a queue of connections would take."""
    until = threading.Event()
    with Callers(seconds_to_greet=2) as callers:
        crowd = [threading.Thread(target=stranger, args=(callers.port, until), daemon=True) for _ in range(30)]
        for one in crowd:
            one.start()
        time.sleep(0.2)
        command = [sys.executable, "-c", CALL, str(callers.port), callers.key.hex(), "7"]
        with subprocess.Popen(command) as child:
            caller = callers.next(60)
            assert caller is not None and caller[0] == 7
            caller[1].send(21)
            assert caller[1].recv() == 42
            caller[1].close()
            assert child.wait(20) == 0
        wait_for(lambda: not [one for one in threading.enumerate() if one.name == "caller"], 20)
    until.set()
    for one in crowd:
        one.join()
    assert not [one for one in threading.enumerate() if one.name == "callers"], "nobody listens any more"


@pytest.mark.bad_input
def test_a_caller_with_another_key_is_none():
    with Callers() as callers:
        command = [sys.executable, "-c", CALL, str(callers.port), "00" * 32, "7"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "AuthenticationError" in done.stderr
        assert callers.next(0.1) is None


def wait_for(true, seconds):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def listening():
    """Addresses at which this process listens."""
    return {(one.laddr.ip, one.laddr.port) for one in psutil.Process().net_connections() if one.status == "LISTEN"}


def test_the_store_of_processes_of_one_machine_is_for_this_machine():
    """That of the launcher's ranks, and that of a role's world."""
    before = listening()
    store = local_store()
    assert listening() - before == {("127.0.0.1", store.port)}
    world = ChildWorld("tests.jobs.launch.commands", 0, os.environ)
    assert {ip for ip, _ in listening() - before} == {"127.0.0.1"} and len(listening() - before) == 2
    world.end()
