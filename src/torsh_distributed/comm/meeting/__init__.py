"""Where ranks meet in a store: `rendezvous` brings up a world, `key_wait` waits, `roll_call` says who is missing."""
