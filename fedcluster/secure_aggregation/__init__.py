"""Secure aggregation: the server learns the sum of a cohort's updates and no single one of them.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: Practical Secure Aggregation for
Privacy-Preserving Machine Learning, CCS 2017, in the version for a server that does not follow the protocol.

Device u rounds p_u w_u to multiples of 2^-40, as the mean does, and uploads these integers x_u under masks that cancel:

    y_u = x_u + G(b_u) + sum_{v > u} G(s_uv) - sum_{v < u} G(s_uv)    mod 2^56

    b_u    a seed of u's own                G    a stream cipher
    s_uv   the secret that u and v agree on by Diffie-Hellman: s_uv = s_vu

The sum of all y_u is the sum of all x_u and G(b_u). Every device has split b_u and its private key into shares. Any t
shares recover the secret, and fewer say nothing. For a device whose y_u came, the others reveal their shares of b_u.
For one that went away before, they reveal those of its private key, from which the masks that it left behind follow.
They never reveal both, so a y_u that comes late stays hidden. Five exchanges make a sum:

    advertise   u -> its public keys and a commitment to b_u, signed
    share       the keys of all -> shares for each of the others, encrypted
    mask        the shares for u -> y_u
    confirm     whose y_u came -> u's signature of this list
    unmask      the signatures of t devices -> one share for every device

Integers add up without rounding, so the mean is that of an unmasked cycle to the bit.
"""
