"""The key of a run, which every message between ranks is sealed with, and where it comes from.

LAB_KEY, if it is set: the launcher draws one for local ranks, and so does `./run` for containers. Else the secret that
an orchestrator mounts. Else it is derived from what all ranks of a run share, which keeps strangers' words apart by
accident alone: rank 0 says so.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from workers.config import Config, ConfigError

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
    words = config.key.get_secret_value() if config.key is not None else _mounted(secret)
    what = f"given\0{words}" if words else f"derived\0{config.master_port}\0{agent_run}"
    return Key(hashlib.sha256(b"ranklab key of a run\0" + what.encode("utf-8", "surrogateescape")).digest(), not words)


def _mounted(secret: Path) -> str:
    try:
        return secret.read_text(errors="surrogateescape").strip() if secret.is_file() else ""
    except OSError as error:
        raise ConfigError([f"{secret}, the key of this run, cannot be read: {error.strerror}"]) from None
