"""What the V1 chain remembers of each request: its last drafter inputs, in one device table.

Shapes: B requests of this batch, T token rows of the drafter's buffers, `depth` positions a row.
"""

from __future__ import annotations

from collections.abc import Container

import torch


class History:
    """The last `depth` drafter inputs of every request, in one table on the device.

    Args:
        buffers: the drafter's input buffers, token dimension first; one column of the table each.
        num_rows: requests that can be remembered at once.
        depth: positions remembered per request (K - 1).
    """

    def __init__(self, buffers: list[torch.Tensor], num_rows: int, depth: int) -> None:
        device = buffers[0].device
        self.depth = depth
        self.columns = [
            torch.zeros(num_rows, depth, *b.shape[1:], dtype=b.dtype, device=device)
            for b in buffers
        ]
        # Sequence index just behind the newest entry, and number of entries, a request.
        self.end = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.count = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.row_of: dict[str, int] = {}
        self.free = list(range(num_rows))

    def rows(self, request_ids: list[str], alive: Container[str]) -> torch.Tensor:
        """Table rows of the requests of this batch, [B] int64; new requests get empty rows."""
        if any(request_id not in self.row_of for request_id in request_ids):
            batch = set(request_ids)
            for request_id in [r for r in self.row_of if r not in alive]:
                self.free.append(self.row_of.pop(request_id))
            # Preempted requests prefill again when they return, so they need no history.
            waiting = [r for r in self.row_of if r not in batch]
            for request_id in request_ids:
                if request_id not in self.row_of:
                    row = self.free.pop() if self.free else self.row_of.pop(waiting.pop())
                    self.row_of[request_id] = row
                    self.count[row] = 0
        rows = [self.row_of[request_id] for request_id in request_ids]
        return torch.tensor(rows, dtype=torch.int64, device=self.end.device)

    def push(
        self,
        rows: torch.Tensor,
        buffers: list[torch.Tensor],
        starts: torch.Tensor,
        first: torch.Tensor,
        num_new: torch.Tensor,
    ) -> None:
        """Append each request's `num_new` valid rows of this window, keeping the newest `depth`.

        Args:
            rows: [B] table rows.
            buffers: the drafter's input buffers.
            starts: [B] index of each window's first row in the buffers.
            first: [B] sequence index of that row.
            num_new: [B] rows whose tokens were not rejected.
        """
        slot = num_new[:, None] + torch.arange(self.depth, device=rows.device)
        kept = slot < self.depth
        source = (starts[:, None] + slot - self.depth).clamp(min=0)
        for column, buffer in zip(self.columns, buffers, strict=True):
            old = column[rows]
            index = slot.clamp(max=self.depth - 1).view(*slot.shape, *[1] * (old.dim() - 2))
            shifted = old.gather(1, index.expand_as(old))
            column[rows] = torch.where(broadcast_mask(kept, old), shifted, buffer[source])
        known = torch.where(self.end[rows] == first, self.count[rows], 0)
        self.count[rows] = (known + num_new).clamp(max=self.depth)
        self.end[rows] = first + num_new


def broadcast_mask(mask: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`mask` with trailing dimensions of size 1, to broadcast against `other`."""
    return mask.view(*mask.shape, *[1] * (other.dim() - mask.dim()))
