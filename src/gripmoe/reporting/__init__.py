"""From the files of finished cells to tables and figures. Needs pandas and matplotlib, never torch."""
