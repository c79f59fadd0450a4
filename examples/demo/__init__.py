"""The parts of the training demo: model, data, optimizers, loop, comparison, progress and report."""

import os

# Must be set before torch is loaded. By default OpenMP's threads spin while they wait for each other; when another
# program takes one of two cores, a training step then costs several times as much as with sleeping threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
