"""From the files of finished runs to tables and figures. Needs pandas and matplotlib, never torch."""

# What tables and figures are made by, for their fingerprint; light, since the workflow reads it.
RENDERING = tuple(
    f"gripmoe.{name}"
    for name in (
        "reporting.comparison",
        "reporting.claims",
        "reporting.paired",
        "reporting.attacks",
        "reporting.figures",
        "reporting.mechanism",
        "geometry.example",
        "reporting.collect",
    )
)
