"""NVIDIA's XID errors as data: what each says, and what it says of the card.

An XID of the application (an illegal access) says nothing against the card, and its verdict is `ok`. What is
not listed is unknown.

Sources: NVIDIA, "XID Errors" and its catalog (docs.nvidia.com/deploy/xid-errors), which names a recovery
action per XID; the actions that NVSentinel (NVIDIA) and gpud (leptonai) take for them; the causes in the
table of GCM's `check-syslogs xid` (facebookresearch/gcm).
"""

from __future__ import annotations

from typing import NamedTuple

from rayrec.platform.health.findings import Action, Verdict


class Xid(NamedTuple):
    """One line of the catalog."""

    meaning: str
    verdict: Verdict
    action: Action


XIDS: dict[int, Xid] = {
    13: Xid("graphics engine exception, mostly of the application", "ok", "none"),
    31: Xid("memory page fault, mostly of the application", "ok", "none"),
    32: Xid("corrupted push buffer: driver, PCIe or memory", "suspect", "avoid"),
    38: Xid("driver firmware error", "suspect", "avoid"),
    43: Xid("the application's channel was stopped", "ok", "none"),
    44: Xid("graphics engine fault during a context switch", "suspect", "avoid"),
    45: Xid("channel cleaned up after an earlier error", "ok", "none"),
    46: Xid("the GPU stopped processing", "suspect", "avoid"),
    48: Xid("double-bit ECC error", "bad", "leave"),
    54: Xid("auxiliary power is not connected", "bad", "leave"),
    57: Xid("error in programming the video memory interface", "suspect", "avoid"),
    58: Xid("unstable video memory interface", "bad", "leave"),
    61: Xid("breakpoint of the internal microcontroller", "suspect", "avoid"),
    62: Xid("the internal microcontroller has halted", "bad", "leave"),
    63: Xid("a row is remapped, or a page retired, at the next reset", "suspect", "avoid"),
    64: Xid("a row could not be remapped, or a page not be retired", "bad", "leave"),
    68: Xid("video decoder exception", "ok", "none"),
    69: Xid("graphics engine class error, of the application", "ok", "none"),
    74: Xid("NVLink error", "bad", "leave"),
    78: Xid("vGPU start error", "suspect", "avoid"),
    79: Xid("the GPU has fallen off the bus", "bad", "leave"),
    80: Xid("corrupted data was sent to the GPU", "suspect", "avoid"),
    92: Xid("high rate of single-bit ECC errors", "suspect", "avoid"),
    93: Xid("wear limit of the InfoROM", "ok", "none"),
    94: Xid("contained memory error: one application has ended", "suspect", "avoid"),
    95: Xid("uncontained memory error", "bad", "leave"),
    109: Xid("timeout of a context switch", "suspect", "avoid"),
    110: Xid("security fault", "bad", "leave"),
    119: Xid("the GPU's system processor (GSP) does not answer", "bad", "leave"),
    120: Xid("error of the GPU's system processor (GSP)", "bad", "leave"),
    121: Xid("corrected error of the link to the CPU (C2C)", "suspect", "avoid"),
    122: Xid("read error of the power management unit", "suspect", "avoid"),
    123: Xid("write error of the power management unit", "suspect", "avoid"),
    136: Xid("training of a link has failed", "bad", "leave"),
    137: Xid("NVLink privilege error, of the application", "ok", "none"),
    140: Xid("ECC error that was not recovered", "bad", "leave"),
    143: Xid("the GPU cannot be initialized", "bad", "leave"),
    144: Xid("NVLink: SAW error", "bad", "leave"),
    145: Xid("NVLink: RLW error", "bad", "leave"),
    146: Xid("NVLink: TLW error", "bad", "leave"),
    147: Xid("NVLink: TREX error", "bad", "leave"),
    148: Xid("NVLink: NVLPW control error", "bad", "leave"),
    149: Xid("NVLink: NETIR error", "bad", "leave"),
    150: Xid("NVLink: MSE error", "bad", "leave"),
    151: Xid("key rotation error", "bad", "leave"),
    154: Xid("the GPU asks for a recovery", "bad", "leave"),
    155: Xid("NVLink: error defined by software", "suspect", "avoid"),
    156: Xid("a resource is retired at the next reset", "suspect", "avoid"),
    157: Xid("a resource could not be retired", "bad", "leave"),
    158: Xid("fatal timeout", "bad", "leave"),
    159: Xid("error of the coherent interface (CHI)", "bad", "leave"),
    160: Xid("a memory channel is retired at the next reset", "suspect", "avoid"),
    161: Xid("a memory channel could not be retired", "bad", "leave"),
    162: Xid("power smoothing is available again", "ok", "none"),
    167: Xid("fatal timeout of PCIe", "bad", "leave"),
    171: Xid("uncorrectable error of the memory", "bad", "leave"),
    172: Xid("uncorrectable error of a cache or register", "bad", "leave"),
}

SEVERE_BY_WORD = frozenset(range(144, 151))
"""NVLink 5: the line itself says whether the error is fatal."""
RECOVERY = 154
"""Its line names what the GPU asks for; `None` withdraws it."""
