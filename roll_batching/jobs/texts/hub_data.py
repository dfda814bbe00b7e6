"""Reads data sets of the Hugging Face hub, named as `hf://openai/gsm8k?name=main&split=train`, through `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from roll_batching.jobs.texts.faults import Fault

_SCHEME = "hf://"
_OPTIONS = ("name", "split", "revision", "data_files", "data_dir")
_FORM = "Write hf://OWNER/NAME?split=train, with &name=CONFIGURATION and &revision=COMMIT where needed."


def is_hub_name(path: object) -> bool:
    """Whether `path` names a data set of the hub."""
    return isinstance(path, str) and path.startswith(_SCHEME)


def load_hub_data(url: str) -> Any:
    """The `datasets.Dataset` that `url` names; downloaded once, then read from the cache of `datasets`.

    Raises Fault: without the package, for unknown options, several splits, or data that cannot be had.
    """
    try:
        import datasets
    except ImportError:
        raise Fault("needs the package datasets", "pip install 'roll-batching[datasets]'.") from None
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)  # split=train+test
    options = dict(pairs)
    if len(options) < len(pairs):
        raise Fault("has an option twice, and one value is read", "Name several files in file_name, each as hf://...")
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise Fault(f"has the option {unknown[0]!r}; there are {', '.join(_OPTIONS)}", _FORM)
    try:
        data = datasets.load_dataset(parts.netloc + parts.path, **options)
    except Exception as error:  # of the hub, the network, the files or the builder
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise Fault(f"cannot be loaded ({cause[:600]})", _FORM) from None
    if not isinstance(data, datasets.Dataset):
        if len(data) != 1:
            raise Fault(f"has the splits {', '.join(map(str, data))}, and one is read", f"Add ?split=NAME. {_FORM}")
        (data,) = data.values()
    return data


def hub_batches(url: str, size: int) -> Iterator[Any]:
    """Yields the rows as Arrow tables of `size` rows. Raises Fault."""
    yield from load_hub_data(url).with_format("arrow").iter(batch_size=size)
