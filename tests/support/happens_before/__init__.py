"""A happens-before checker: a real step runs on CPU tensors that look like a GPU's, and what nothing orders is
reported.

``clocks`` decides what is ordered, ``footprints`` what overlaps. ``recorder`` sees every operation. ``fake_cuda`` and
``nccl_twin`` stand in for ``torch.cuda`` and NCCL. ``programs`` are random programs, ``runs`` runs them, ``removals``
takes one synchronisation of the package away. docs/proofs.md describes what is proved.
"""
