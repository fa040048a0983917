"""What `monarchc inspect` shows of a plan, one file a section: `data(plan)` is its JSON value, `show(out, plan)` prints
it."""
