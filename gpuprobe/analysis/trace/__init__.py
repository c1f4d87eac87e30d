"""An allocation trace: its ledger, lifetimes, categories, frames and curves."""
