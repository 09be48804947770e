"""The benchmark of autoscalers: every policy on the same requests, the same fleet and the same chance.

`traces` says what is asked, `play` lets one policy answer, `results` keeps what came of it, `page` and `picture` show
it.
"""
