"""What makes a step faster or smaller: fp8 products, attention kernels, a loss that never holds whole logits."""
