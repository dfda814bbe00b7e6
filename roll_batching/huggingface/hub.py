"""Downloads models from the Hugging Face hub, and uploads exported models."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import TEXTS, find_directory

logger = logging.getLogger(__name__)

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form OWNER/NAME of a repository, and no directory of this machine has it."""
    return _NAME.fullmatch(name) is not None and not os.path.isdir(name)


def download_models(names: Iterable[str | None]) -> bool:
    """Downloads the named models that are neither here nor in the cache; whether there was one.

    A model that cannot be downloaded brings a warning: the job's check reports that it is missing.
    """
    missing = sorted({name for name in names if name and is_hub_name(name) and find_directory(name) is None})
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        return False
    downloaded = False
    for name in missing if not constants.HF_HUB_OFFLINE else ():
        logger.warning("downloading %s into Hugging Face's cache", name)
        try:
            snapshot_download(name, allow_patterns=[*(f"*{suffix}" for suffix in TEXTS), "*.safetensors"])
            downloaded = True
        except Exception as error:  # of the network, the hub or the disk
            logger.warning("%s cannot be downloaded: %s", name, _cause(error))
    return downloaded


class HubRepository:
    """A model repository of the hub, private when it is new.

    Raises ConfigError without the package or a network, and for a token that may not write there.
    """

    def __init__(self, name: str) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError:
            raise ConfigError("--push needs the package huggingface_hub: pip install 'roll-batching[hf]'") from None
        self._api: Any = HfApi()
        try:
            self.name: str = self._api.create_repo(name, private=True, exist_ok=True).repo_id
        except Exception as error:
            text = f"--push {name}: the repository cannot be made or written: {_cause(error)}"
            raise ConfigError(f"{text}. Log in with a token that may write (hf auth login, or HF_TOKEN)") from None

    def upload(self, folder: Path, message: str) -> None:
        """Upload the files of `folder` as one commit. Raises ConfigError."""
        try:
            self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except Exception as error:
            cure = f"Upload it with: hf upload {self.name} {folder}"
            raise ConfigError(f"{folder} is written, but not uploaded: {_cause(error)}. {cure}") from None


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
