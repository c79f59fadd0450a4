"""What does not train: the commands ``meshmuon plan`` and ``meshmuon doctor``, predictions, converters."""
