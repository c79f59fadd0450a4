"""Which parameters Muon takes and which AdamW, and the table that shows it."""
