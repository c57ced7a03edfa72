"""What the first rank of a set answers, as pure functions of what was asked: `request_table`, then `agreed_answers`.

`response_cache` has the numbers of repeated requests, `fusion_plan` what shares a buffer.
"""
