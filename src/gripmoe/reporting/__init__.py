"""From the files of finished runs to tables and figures. Needs pandas and matplotlib, and no torch but for
`geometry.example`, whose numbers two notebooks draw."""

TABLES = ("runs", "histories", "answers", "attacks")  # what `gripmoe collect` writes of a world
# The modules that make tables and figures, for their fingerprint. The workflow imports this, so it stays light.
RENDERING = (
    "gripmoe.reporting.specifications",
    "gripmoe.reporting.comparison",
    "gripmoe.reporting.claims",
    "gripmoe.reporting.paired",
    "gripmoe.reporting.attacks",
    "gripmoe.reporting.erasure",
    "gripmoe.reporting.erasure_goals",
    "gripmoe.reporting.tables",
    "gripmoe.reporting.figures",
    "gripmoe.reporting.mechanism",
    "gripmoe.geometry.example",
    "gripmoe.reporting.collect",
    "gripmoe.reporting.runs",
    "gripmoe.reporting.sources",
)
