"""Where the base's hidden states come from: the model in process, a cache on disk, or a server.

All three are a `HiddenSource` (`mtp.teacher.source`): hidden states after the final norm, the
embedding, `lm_head`, a device and its arithmetic. Training asks for nothing else, so they can be
exchanged. Only the model in process (`Teacher`) can also continue a text, which evaluation needs.
"""

from mtp.teacher.device import pick_device, pick_dtype
from mtp.teacher.in_process import Teacher

__all__ = ["Teacher", "pick_device", "pick_dtype"]
