"""The sections of `monarchc inspect`, one file each: `data(plan)` is its JSON value, `show(out, plan)` prints it."""
