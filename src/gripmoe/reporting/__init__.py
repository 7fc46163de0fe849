"""From the files of finished runs to tables and figures. Needs pandas and matplotlib, never torch."""

# What tables and figures are made by, for their fingerprint; light, since the workflow reads it.
RENDERING = (
    "gripmoe.reporting.comparison",
    "gripmoe.reporting.claims",
    "gripmoe.reporting.paired",
    "gripmoe.reporting.attacks",
    "gripmoe.reporting.figures",
    "gripmoe.reporting.mechanism",
    "gripmoe.geometry.example",
    "gripmoe.reporting.collect",
)
