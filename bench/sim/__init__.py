"""A swarm of tiny policies in one process, with the rules of the product: does sharing pay?"""
