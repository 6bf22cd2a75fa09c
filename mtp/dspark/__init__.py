"""The other draft: DSpark, in the format of `speculators`, served by vLLM beside an unchanged base.

Where the MTP head is grafted into the base, this draft is a folder of its own. It reads the base's
hidden states after a few of its layers, and drafts a whole block at once: a DFlash backbone, a
low-rank Markov bias from each token to the next, and a head that says how sure it is.

    recipe.py      [dspark] of a recipe
    config.py      the shape, from a base and a recipe
    config_json.py the config.json that speculators and vLLM read
    vocabulary.py  the tokens that can be drafted
    model.py       the backbone and its two heads
    anchors.py     where blocks start, and which of their slots are supervised
    loss.py        what a slot should say, and how far it is from that
    evaluate.py    what vLLM will measure, and the table of the reference trainer
    draft.py       all of it behind the trainer's interface
    export.py      written, and read back
"""
