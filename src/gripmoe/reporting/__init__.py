"""From the files of finished runs to tables and figures. Needs pandas and matplotlib, never torch."""

# The modules that make tables and figures, for their fingerprint. The workflow imports this, so it stays light.
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
