"""A host in a temporary folder, imported and patched by our integration."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.integrations import hosts
from tests.integrations.hosts import HOSTS, IMPORTED, forget


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Installs a host, or another text of one of its modules, and imports our module for it."""

    def install(name, **changed):
        forget(name)
        hosts.write(tmp_path, HOSTS[name] | changed)
        monkeypatch.syspath_prepend(str(tmp_path))
        module, _ = IMPORTED[name]
        importlib.import_module(module)
        sys.modules.pop(f"roll_batching.integrations.{name}", None)
        return importlib.import_module(f"roll_batching.integrations.{name}")

    yield install
    forget(*HOSTS)
    for name in HOSTS:
        sys.modules.pop(f"roll_batching.integrations.{name}", None)
