"""RankTrainer: what one rank does with packed pairs."""
