"""The printed outputs and quoted sources in README.md and docs/*.md, written into the pages by what produces them."""
