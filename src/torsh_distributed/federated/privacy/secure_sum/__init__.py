"""Secure aggregation: the server learns the sum of a round's updates and none of them (SecAgg+, Bell et al., 2020).

`secure_aggregation` has the settings. `sum_member` is a client's part, step by step, and `sum_collector` the server's;
`sum_roster` is who takes part, with which keys. `sharing_plan` says who shares secrets with whom, `secret_shares` how,
`mask_words` makes masks, `packed_words` packs what travels.
"""
