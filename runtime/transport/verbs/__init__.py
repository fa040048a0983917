"""Remote direct memory access through the verbs interface: InfiniBand, RoCE, and the kernel's software device (rxe).

Read in this order: `adapter` (the few calls that are needed, and which library makes them), `with_pyverbs` and
`with_ibverbs` (the two libraries), `ports` (which port and address to use), `gpu` and `memory` (registered memory),
`schedule` (which requests may be sent when: pure), `link` and `transport`.
"""
