"""The key of a run, which every message between ranks is sealed with, and where it comes from.

LAB_KEY, or what is in the file that LAB_KEY_FILE names; if neither is set, one that the launcher draws for local ranks
and `./run` for containers. Else the secret that Compose or an orchestrator mounts. Else it is derived from what all
ranks of a run share, which keeps strangers' words apart by accident alone: rank 0 says so.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from workers.config import Config, ConfigError
from workers.config.values import MIN_KEY

SECRET = Path("/run/secrets/lab_key")  # where Compose, Swarm and Kubernetes put a secret of this name by custom
DERIVED = (
    "key        derived from MASTER_PORT and no secret: whoever reaches this network can speak as a rank. Set LAB_KEY"
    " alike on all ranks"
)


class Key(NamedTuple):
    """32 bytes, and whether anybody could have derived them."""

    secret: bytes
    derived: bool


def key_of(config: Config, agent_run: str = "", secret: Path = SECRET) -> Key:
    """The key of the run that these settings are of; `agent_run` tells runs of one torchrun port apart.

    Raises ConfigError where there is a secret that cannot be read.
    """
    words = config.key.get_secret_value() if config.key is not None else _read(config.key_file or secret)
    what = f"given\0{words}" if words else f"derived\0{config.master_port}\0{agent_run}"
    return Key(hashlib.sha256(b"ranklab key of a run\0" + what.encode("utf-8", "surrogateescape")).digest(), not words)


def _read(secret: Path) -> str:
    """Its words; empty where there is no such file, or an empty one."""
    try:
        words = secret.read_text(errors="surrogateescape").strip() if secret.is_file() else ""
    except OSError as error:
        raise ConfigError([f"{secret}, the key of this run, cannot be read: {error.strerror}"]) from None
    if words and len(words) < MIN_KEY:
        raise ConfigError(
            [f"{secret}, the key of this run, holds {len(words)} characters: allowed is {MIN_KEY} and more, or none"]
        )
    return words
