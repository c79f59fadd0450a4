"""The packages that the development install does not have: axolotl, verl, NeMo Automodel, Ray. ``make test-trainers``
runs this.

The files are called ``check_*`` so that ``make test`` does not collect them. Nothing is skipped: what cannot be
imported fails.
"""
