"""How plans come to be run: the Protocol that the runtime implements, who starts workers, and who hears of what happens
to them."""
