"""Every operator below autograd: where it runs, what it may not do, what memory it takes."""
