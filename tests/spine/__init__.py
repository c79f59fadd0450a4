"""What must not change while the package is written anew: bits, formulas, checkpoints, plans; by public names alone.

``case.py`` says what a case is and ``cases.py`` lists all of them. ``run.py`` runs one on a rank, ``ranks.py`` on
processes that stay. ``oracle.py`` is Muon as plain loops, ``bounds.py`` how far rounding may lead. ``write_*.py`` have
written the frozen files.
"""
