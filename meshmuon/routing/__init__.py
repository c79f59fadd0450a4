"""Which parameters go to Muon and which to AdamW, and the table that shows it."""
