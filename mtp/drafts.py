"""The kinds of draft that can be trained, by `train.draft` of a recipe."""

from mtp.draft import Draft, MTPDraft
from mtp.dspark.draft import DSparkDraft

DRAFTS: dict[str, type[Draft]] = {kind.name: kind for kind in (MTPDraft, DSparkDraft)}
