"""What a training would take: bytes on each device, and bytes of each step.

Arithmetic alone: it needs neither Keras nor a framework, so that
`keras-dist plan` answers at once. `keras_dist.summary` uses the same.

With `T` bytes of trainable variables, `F` of others, `S` of an optimizer's
slots, `C` of its counters; `n` devices that compute on each of `W` workers and
`N = n W` replicas:

| what | mirrored | optimizer's state sharded | central |
|---|---|---|---|
| a device that computes keeps | T + F + S + C | T + F + S / N + C | nothing |
| the parameter device keeps | | | T + F + S + C |
| a step adds, where it computes | T | T | T + F + T |
| a step adds, where parameters are | | | T |
| a device sends to its worker's | 2 (n - 1) / n T | the same | T |
| the parameter device sends | | | n (T + F) |
| a worker sends to others | 2 (W - 1) / W T | the same | the same |

Gradients have the size and type of the trainable variables. What a step adds
is gradients, and where variables are central the values that were sent. It
does not know activations, the framework's own buffers, and copies that mixed
precision casts for a while.

A ring all-reduce of `T` bytes among `n` has each send `2 (n - 1) / n T`, which
is the least that any can (Patarasuk and Yuan, 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations"). It is a reduce-scatter of
gradients and an all-gather, each with half of that; so an update between the
two, of a part of the variables on each replica, costs nothing more
(Rajbhandari et al., 2020, "ZeRO: memory optimizations toward training trillion
parameter models"). Workers add up on their own devices first, and each sends
one sum. A backend may send more than these, where it does something simpler.
"""
