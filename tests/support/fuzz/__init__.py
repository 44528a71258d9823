"""Plans drawn from seeds, the worlds of engines and processes that obey them, and how a failing plan is made small."""
