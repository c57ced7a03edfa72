"""What each rank holds, as named terms: `rank_memory` computes the table, `closing_the_gap` tries changes of a plan."""
