"""Estimates for a training: bytes on each device, and bytes sent in a step.

They are arithmetic and need neither Keras nor a framework, so that
`keras-dist plan` answers at once. `keras_dist.summary` uses the same formulas.

With `T` bytes of trainable variables, `F` of others, `S` of an optimizer's
slots, `C` of its counters; `n` devices that compute on each of `W` workers and
`N = n W` replicas:

| bytes | mirrored | optimizer's state sharded | central |
|---|---|---|---|
| a device that computes keeps | T + F + S + C | T + F + S / N + C | nothing |
| the parameter device keeps | | | T + F + S + C |
| a step adds, where it computes | T | T | T + F + T |
| a step adds, where parameters are | | | T |
| a device sends inside its worker | 2 (n - 1) / n T | the same | T |
| the parameter device sends | | | n (T + F) |
| a worker sends to others | 2 (W - 1) / W T | the same | the same |

Gradients have the size and type of the trainable variables. A step adds
gradients and, with central variables, the copies that devices were sent.
Activations are counted only if they are given. Buffers of the framework and
temporary casts of mixed precision are not counted, and neither is what an
optimizer computes with: on PyTorch three times 64 MiB for Adam, or three times
the largest variable, if that is larger.

A ring all-reduce of `T` bytes among `n` devices has each send
`2 (n - 1) / n T`, which is the least that is possible (Patarasuk and Yuan,
2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
It is a reduce-scatter of gradients and an all-gather, each with half of the
bytes. So an update between the two, of a part of the variables on each replica,
sends nothing more (Rajbhandari et al., 2020, "ZeRO: memory optimizations toward
training trillion parameter models"). Workers first add gradients up on their
own devices, and each sends one sum. A backend that does something simpler may
send more: with a sharded state, JAX on CPU devices adds whole gradients up and
sends 1.5 times as much.
"""
