"""Homes in which something is known already, so that no test waits until it is found out."""

import json

from localrag.engine import attention
from localrag.engine.attention import machine_key
from localrag.engine.threads import ThreadGovernor, num_cores


def know_attention(home):
    """Flash attention is the slower kernel here."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = {"for": attention._key(ThreadGovernor()), "flash_attention": False, "flash_s": 2.0, "plain_s": 1.0}
    (home / "attention.json").write_text(json.dumps(record))


def know_machine(home, *, prefill_weights_per_s=140e9, decode_bytes_per_s=20e9):
    """The machine is as fast as this: by default about as two cores of a server."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "machine.json").write_text(json.dumps({machine_key(num_cores()): [prefill_weights_per_s, 0.0, decode_bytes_per_s]}))
