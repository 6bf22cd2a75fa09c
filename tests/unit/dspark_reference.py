"""DSpark, slowly: one block and one query at a time, in float64, from named tensors."""

from __future__ import annotations

import math

import torch


def norm(x, weight, eps):
    return x / (x.square().mean() + eps).sqrt() * weight


def rotate(head, position, theta):
    """One head [d] at one position; halves are paired."""
    half = len(head) // 2
    result = head.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(head))
        a, b = head[i], head[i + half]
        result[i] = a * math.cos(angle) - b * math.sin(angle)
        result[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return result


def block_hidden(config, weights, aux, embeddings, anchor):
    """[S, H] of the block at `anchor`; aux [T, A * H] and embeddings [S, H] in float64."""
    eps, size = config.rms_norm_eps, config.head_dim
    theta = config.rope_parameters["rope_theta"]
    groups = config.num_attention_heads // config.num_key_value_heads
    context = [norm(weights["fc.weight"] @ a, weights["hidden_norm.weight"], eps) for a in aux]
    states = list(embeddings)
    for number, kind in enumerate(config.layer_types):
        w = {
            name.removeprefix(f"layers.{number}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        normed = [norm(x, w["input_layernorm.weight"], eps) for x in states]

        def heads(name, x, w=w):
            return (w[f"self_attn.{name}.weight"] @ x).view(-1, size)

        def keys(x, position, w=w, heads=heads):
            scale = w["self_attn.k_norm.weight"]
            return [rotate(norm(k, scale, eps), position, theta) for k in heads("k_proj", x)]

        read = [(keys(y, j), heads("v_proj", y)) for j, y in enumerate(context[:anchor])]
        own = [(keys(y, anchor + k), heads("v_proj", y)) for k, y in enumerate(normed)]
        outputs = []
        for slot, x in enumerate(normed):
            position = anchor + slot
            is_full = kind == "full_attention"
            first = 0 if is_full else max(position - config.sliding_window + 1, 0)
            seen = read[first:] + own[: None if is_full else slot + 1]
            mixed = []
            for head, q in enumerate(heads("q_proj", x)):
                q = rotate(norm(q, w["self_attn.q_norm.weight"], eps), position, theta)
                scores = torch.stack([k[head // groups] @ q for k, _ in seen]) / size**0.5
                values = torch.stack([v[head // groups] for _, v in seen])
                mixed.append(scores.softmax(0) @ values)
            outputs.append(w["self_attn.o_proj.weight"] @ torch.cat(mixed))
        states = [x + y for x, y in zip(states, outputs, strict=True)]
        for slot, x in enumerate(states):
            y = norm(x, w["post_attention_layernorm.weight"], eps)
            gate, up = w["mlp.gate_proj.weight"] @ y, w["mlp.up_proj.weight"] @ y
            states[slot] = x + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([norm(x, weights["norm.weight"], eps) for x in states])


def slot_logits(weights, hidden, previous):
    """[D] draft logits and the confidence logit of one slot."""
    embedded = weights["markov_head.markov_w1.weight"][previous]
    logits = weights["lm_head.weight"] @ hidden + weights["markov_head.markov_w2.weight"] @ embedded
    features = torch.cat([hidden, embedded])
    confidence = weights["confidence_head.proj.weight"][0] @ features
    return logits, confidence + weights["confidence_head.proj.bias"][0]
