"""What the first rank of a set answers, as pure functions of what was asked: `request_table`, then `agreed_answers`.

Repeated requests have numbers there; what shares a buffer is decided here.
"""
