"""The paper's mathematics on plain tensors: routing sets, null spaces, half-spaces, realignment. Needs torch alone.

Shape suffixes, used throughout: N tokens, d hidden size, E experts, k experts per token, r retained rank. The paper's
columns X_r (d x N) are rows here, `x_Nd`.
"""
