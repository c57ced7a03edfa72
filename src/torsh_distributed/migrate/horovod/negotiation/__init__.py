"""Operations meet by name: `request` says what a rank wants, `answers` when all want it, `set_engine` runs it.

One engine per process set: a thread, a group and control links of its own. Read `request`, `answers.request_table`,
`set_engine`, then `group_operations`.
"""
