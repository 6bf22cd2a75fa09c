"""The losses as their definitions say them: float64, loops, autograd, nothing chunked or aligned.

Written from the papers' formulas, without a line of `mtp.losses`.
"""

import torch


def reference_loss(case, objective):
    """Scalar loss of a `Case`, differentiable by its outputs."""
    log_p = torch.log_softmax(case.hidden @ case.lm_head.T / objective.temperature, -1)
    log_q = [
        torch.log_softmax(o @ case.lm_head.T / objective.temperature, -1) for o in case.outputs
    ]
    rows, length = case.ids.shape

    def is_target(row, token):
        return token < length and bool(case.mask[row, token])

    total = torch.zeros((), dtype=torch.float64)
    for k, output in enumerate(case.outputs):
        tokens = []  # weight, row, start
        for row in range(rows):
            for start in range(output.shape[1]):
                if is_target(row, start + k + 2):
                    tokens.append((float(case.row_weights[row]), row, start))
        weight_sum = sum(weight for weight, _, _ in tokens)
        if not weight_sum:
            continue
        kl, tv, ce = [], [], []
        for _, row, start in tokens:
            target = start + k + 2
            p, q = log_p[row, target - 1], log_q[k][row, start]
            kl.append((p.exp() * (p - q)).sum())
            tv.append((p.exp() - q.exp()).abs().sum() / 2)
            ce.append(-q[case.ids[row, target]])
        shares = [weight / weight_sum for weight, _, _ in tokens]
        mean_kl, mean_tv, mean_ce = (
            sum(s * v for s, v in zip(shares, values, strict=True)) for values in (kl, tv, ce)
        )
        mix = torch.exp(-objective.lk_eta * (1 - mean_tv)).item()
        step = objective.ce * mean_ce + objective.kl * mean_kl + objective.tv * mean_tv
        step = step + objective.lk * (mix * mean_kl + (1 - mix) * mean_tv)
        total = total + case.position_weights[k] * step
    return total + objective.e2e_tv * end_to_end(case, log_p, log_q, is_target)


def end_to_end(case, log_p, log_q, is_target):
    """Mean over starts of 1/K sum_k (1 - prod_{j<=k} alpha_j), chain by chain."""
    num_steps = len(case.position_weights)
    losses, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for row in range(len(case.ids)):
        for start in range(case.ids.shape[1] - 2):
            if not is_target(row, start + 2):
                continue
            weight_sum += float(case.row_weights[row])
            survival = torch.ones((), dtype=torch.float64)
            for k in range(num_steps):
                if not is_target(row, start + k + 2):
                    break
                p, q = log_p[row, start + k + 1].exp(), log_q[k][row, start].exp()
                survival = survival * torch.minimum(p, q).sum()
                losses = losses + float(case.row_weights[row]) * (1 - survival) / num_steps
    return losses / weight_sum if weight_sum else losses
